"""What did a person hand in?  Models, clusters and launch files, read into the vocabulary of the planner."""
