#!/usr/bin/env bash
#SBATCH --job-name=gpt2-2.5b-powersgd
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
# GPT2-2.5B on 32 V100: gradients compressed by PowerSGD at one rank. scripts/pretrain.sh says how to start it.
MODEL=${MODEL:-gpt2_2.5b}
METHOD=powersgd
here=${BASH_SOURCE[0]}
[[ $here == */slurm_script ]] && # sbatch runs a copy
    here=$(scontrol show job "$SLURM_JOB_ID" | sed -n '0,/^ *Command=/s/^ *Command=\(.*\/pretrain_gpt2[^ ]*\.sh\).*/\1/p')
source "$(dirname -- "$here")/pretrain.sh"
