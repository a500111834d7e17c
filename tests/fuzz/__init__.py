"""Random compositions of features, each trained by the engine and by plain PyTorch in one process, and compared.

    make fuzz SEED=s COUNT=n          trains the compositions of the seeds s to s+n-1

    draw.py     a seed gives a composition: the model, the optimizer, and two topologies with their settings
    model.py    the layers that a composition draws from, as a pipeline's list and as one module
    plain.py    the reference: one process, plain PyTorch
    run.py      the same training by the engine: on one topology, saved, and on from there on another; what differs
"""
