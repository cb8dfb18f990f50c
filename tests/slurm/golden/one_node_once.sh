#!/bin/bash
# Study study: task N runs line N of runs.txt, which holds the run's folder and then its settings.
#SBATCH --job-name=study-1f18fef3
#SBATCH --array=1,3-5
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=3
#SBATCH --signal=B:USR1@120
#SBATCH --no-requeue
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me/micro
#SBATCH --output='/disk/%%j runs/slurm/study-1f18fef3/logs/%A_%a.log'

row=$(sed -n "${SLURM_ARRAY_TASK_ID:?submit this script with sbatch}p" '/disk/%j runs/slurm/study-1f18fef3/runs.txt')
[ -n "$row" ] || { echo "runs.txt has no line $SLURM_ARRAY_TASK_ID" >&2; exit 2; }
run=${row%% *}
eval "words=(${row#* })"

export MICRO_LAUNCH=node  # each task of srun starts the workers of its node

saved() { find '/disk/%j runs'/"$run"/checkpoints -name 'step-*' 2>/dev/null | sort | tail -n 1; }
before=$(saved)
echo "$run"
stopping= step=
trap 'stopping=yes; [ -z "$step" ] || kill -USR1 "$step"' USR1  # before the time limit; srun passes it on
# ALL: with sbatch's --export=NONE the tasks would not have what setup and this script set.
srun --export=ALL --ntasks-per-node=1 --cpus-per-task=3 --kill-on-bad-exit=1 \
  /venv/bin/python -m experiments.train "${words[@]}" cluster.rdzv_endpoint=localhost:0 &
step=$!
wait "$step"; code=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done  # a signal ends a wait, not the run

exit "$code"
