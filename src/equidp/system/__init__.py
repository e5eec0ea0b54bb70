"""What every part needs from the machine: files and locks, signals, threads, the network, logs, notebooks, memory.

It imports `equidp.errors` and `equidp.options`, and nothing else of this package. Nothing here depends on what
is trained. Begin with `files.replacing`: a file is written whole or not at all.
"""
