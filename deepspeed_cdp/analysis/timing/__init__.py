"""Predicts step times: an event simulation of all ranks, and the baselines beside it. Pure, no torch."""
