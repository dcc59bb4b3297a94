"""The device mesh, the axis rules, collectives per mesh axis, and pipeline schedules."""
