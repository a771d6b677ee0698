"""What fitted posteriors share: one trainer, its checkpoints, the log joint that is learnt."""
