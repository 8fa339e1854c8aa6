#!/bin/bash
# The batch script of a single-node job: nothing but srun with the arguments that sbatch was given, word by word.
exec srun "$@"
