"""The training step and what it is made of: plan, mesh, models, losses, step, guard and optimizers."""
