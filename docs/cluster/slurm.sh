#!/usr/bin/env bash
# A run on the nodes of a Slurm allocation. Ray assigns GPUs, so three keys of gpu8 have to change:
#   sbatch docs/cluster/slurm.sh --config gpu8 --set 'engine.devices=[]' --set learner.device=cuda:0 \
#     --set transport.weights=disk --actors 12
# A job that is preempted, or started again by `scontrol requeue`, keeps its number, and goes on with its run.
# The extra `cluster` must be installed in the same environment on every node.
#SBATCH --job-name=mage
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')
gpus=${SLURM_GPUS_PER_TASK:-0}

# --block keeps ray in the foreground of its srun, so it ends with the job.
srun --nodes=1 --ntasks=1 -w "$head" ray start --head --node-ip-address="$address" --port=6379 \
  --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$gpus" --include-dashboard=false --block &
until ray status --address "$address:6379" >/dev/null 2>&1; do sleep 2; done
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" \
    ray start --address="$address:6379" --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$gpus" --block &
fi
until [ "$(ray status --address "$address:6379" | grep -c '^ *1 node_')" -ge "$SLURM_JOB_NUM_NODES" ]; do sleep 2; done

# The doctor checks the nodes for the run that follows, so it gets those of its options that it has too.
checked=()
given=("$@")
for ((i = 0; i < ${#given[@]}; i++)); do
  case ${given[i]} in
    --config | --actors | --set) checked+=("${given[i]}" "${given[i + 1]}") ;;
    --config=* | --actors=* | --set=*) checked+=("${given[i]}") ;;
  esac
done
mage doctor --cluster "$address:6379" "${checked[@]}"
mage train --cluster "$address:6379" --resume --run-dir "runs/slurm-$SLURM_JOB_ID" "$@" &
# Slurm sends SIGTERM to this script alone (`B:`), and bash would handle it after the end of a command in the foreground.
trap 'kill -TERM $!' TERM
wait $! || wait $!  # the signal ends the first one
