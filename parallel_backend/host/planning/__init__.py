"""The choice of a plan for a job, by the workers' measurements of their machine."""
