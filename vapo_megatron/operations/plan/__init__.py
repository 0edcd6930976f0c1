"""Plans a run before any GPU is allocated: memory by phase, time by phase, layouts that fit."""
