"""How bytes travel between ranks: process groups, collectives, reductions, peer memory, and the board of failures."""
