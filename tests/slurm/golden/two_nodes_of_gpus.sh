#!/bin/bash
# Study study: task N runs line N of runs.txt, which holds the run's folder and then its settings.
#SBATCH --job-name=study-7fdcf3e8
#SBATCH --array=1,3-5%8
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --partition=gpu
#SBATCH --account=my_project
#SBATCH --qos=high
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me/micro
#SBATCH --output='/disk/%%j runs/slurm/study-7fdcf3e8/logs/%A_%a.log'
#SBATCH --exclusive

row=$(sed -n "${SLURM_ARRAY_TASK_ID:?submit this script with sbatch}p" '/disk/%j runs/slurm/study-7fdcf3e8/runs.txt')
[ -n "$row" ] || { echo "runs.txt has no line $SLURM_ARRAY_TASK_ID" >&2; exit 2; }
run=${row%% *}
eval "words=(${row#* })"

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')  # its name may not resolve
port=$((20000 + SLURM_JOB_ID % 10000))  # each task of the array has a job id of its own

module load cuda
source $HOME/micro/.venv/bin/activate
export MICRO_LAUNCH=node  # each task of srun starts the workers of its node

saved() { find '/disk/%j runs'/"$run"/checkpoints -name 'step-*' 2>/dev/null | sort | tail -n 1; }
before=$(saved)
echo "$run"
stopping= step=
trap 'stopping=yes; [ -z "$step" ] || kill -USR1 "$step"' USR1  # before the time limit; srun passes it on
# ALL: with sbatch's --export=NONE the tasks would not have what setup and this script set.
srun --export=ALL --ntasks-per-node=1 --cpus-per-task=32 --kill-on-bad-exit=1 \
  python -m experiments.train "${words[@]}" cluster.rdzv_endpoint=$head:$port &
step=$!
wait "$step"; code=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done  # a signal ends a wait, not the run

if [ "$code" -eq 75 ] || { [ "$stopping" ] && [ "$code" -ne 0 ]; }; then
  if [ "$(saved)" != "$before" ]; then
    echo "$run was stopped before its end and is queued again"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "$run was stopped before it saved anything new, and is not queued again: raise cluster.slurm.time_limit" >&2
  fi
fi

exit "$code"
