"""What a run needs and takes, before any GPU is held: memory by phase, time by phase, layouts that fit."""
