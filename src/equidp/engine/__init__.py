"""How a private step is done, the same for every algorithm. Knows no algorithm, model, dataset or file by name."""
