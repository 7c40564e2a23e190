"""The pure core, divided by the flows that meet in it.

`index` knows who holds which blocks, `reducer` applies events to the ranks of a partition, `loads` sums up what running
requests cost each rank, `block_facts` knows pools and labels of blocks, and `routing` makes a decision from all of it.
Nothing here does I/O or reads a clock: time, randomness and settings are arguments. `make lint` checks this.
"""
