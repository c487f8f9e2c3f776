"""The choice of a plan for a job, by what the workers measured of their machine."""
