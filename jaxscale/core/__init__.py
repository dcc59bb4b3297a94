"""The training step and its parts: plan, mesh, models, losses, guard and optimizers."""
