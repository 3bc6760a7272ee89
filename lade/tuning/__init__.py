"""What a step costs on this machine: the curve of `lade.decoding.drafting.step_cost`, measured once and saved."""
