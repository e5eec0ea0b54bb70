"""System: what every part needs from the machine: files and locks, signals, threads, network, logs, notebooks, memory.

It imports `equidp.errors` and `equidp.options`, and nothing else of equidp. Nothing here depends on what is trained.
Begin with `files.replacing`, by which a file is written completely or not at all.
"""
