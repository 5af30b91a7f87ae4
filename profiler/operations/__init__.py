"""Operations of training as something that can be run and timed: kernels, collectives, units of the trainer."""
