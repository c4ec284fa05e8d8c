"""Work with the training ranks: choosing their schedule and critic overlap, saving checkpoints, measured costs."""
