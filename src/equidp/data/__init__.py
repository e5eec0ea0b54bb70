"""Records, their schema and groups, the split into parts, and encoding.

- `records`: `Records` (features, labels, groups) and `Schema`. Everything else takes these.
- `membership`: which part a record is in, by its own identity and a public key. `splitting`: divides records into
  parts, by membership or by strata.
- `labelling`, `groupings`, `columns`, `words`, `images`, `idx`: encoding with public constants. Nothing is learnt
  from a record.
- `storage`: records on disk. `raw_files`: where a provider's files are looked for.
- `sources/`: one file for each dataset or format.

It imports `equidp.errors`, `equidp.options` and `equidp.system`. Begin with `records`, then any short file in
`sources/`.
"""
