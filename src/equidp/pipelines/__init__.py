"""Kedro wiring only: every node is a thin function around the library."""
