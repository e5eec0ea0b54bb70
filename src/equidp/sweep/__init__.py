"""Many runs: a grid of settings, each cell one ordinary `kedro run` in a process of its own, fanned out over Dask.

grid       what to run: named grids, their product, the settings of each cell
project    the Kedro project around it: configuration, paths, the MLflow store
cell       one cell: its process, its lock, its marker of completion
cluster    the machines: a local Dask cluster, or any other by its address
fanout     which cell runs when; progress; interruption
comparison which rows are compared with which: the reference's
gains      how much better they are, paired by seed
summary    the results: the table over seeds and the pages
printed    the same in the terminal
doubts     which cells are missing, or of other raw files
"""
