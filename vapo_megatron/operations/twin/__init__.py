"""A run under a clock of its own: what schedules its rollouts drives engines that only take the time for them."""
