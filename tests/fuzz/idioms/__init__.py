"""Random programs of idioms, each run by the engine and by plain PyTorch beside it, and compared after every operation.

    make fuzz-idioms SEED=s COUNT=n     runs the programs of the seeds s to s+n-1

    program.py      a seed gives a program: a model, a stage, a tier, a number of ranks, and a list of operations
    model.py        the model, and what trains it: the engine, or plain PyTorch with the same calls
    operations.py   the operations: passes, reads, writes, contexts, hooks, derivatives, saves and loads
    run.py          many programs in one process, each of whose ranks runs both; what differs

A program passes if every operation gives what plain PyTorch gives, or raises a `ShoalError`. A crash, a hang, any other
exception, and a difference are failures.
"""
