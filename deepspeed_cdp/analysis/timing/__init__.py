"""Predicted step times: simulations of all ranks, and lower bounds for ZeRO-3, FSDP2 and DDP. It needs no torch."""
