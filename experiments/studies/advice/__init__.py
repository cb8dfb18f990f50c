"""Which method is predicted to reach dense's accuracy first: measured epochs times predicted steps."""
