"""`python -m ablation_job CODE` runs CODE: a job for tests of what runs jobs."""

import sys

if __name__ == "__main__":
    exec(sys.argv[1])
