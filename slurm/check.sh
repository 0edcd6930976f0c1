# `bash slurm/train.sbatch [SECTION.KEY=VALUE ...]`, on a login node or in an allocation of salloc: look at what the job
# would meet, as far as it can be seen from this machine, and submit nothing. lib.sh sources this last where sbatch did
# not start the script, in place of the life of a job.

asked() { sed -n "s/^#SBATCH --$1=//p" "$0" | head -n 1; }

leave_allocation() { # its name, nodes and tasks are not those of the job to come; values that the user set stay
    local name nodes
    name=$(CONTROLLER_WAIT=0 job_field JobName "$SLURM_JOB_ID")
    nodes=$(CONTROLLER_WAIT=0 job_field NumNodes "$SLURM_JOB_ID")
    [[ ${RUN:-} != "$name" ]] || RUN=
    [[ ${SLURM_JOB_NAME:-} != "$name" ]] || unset SLURM_JOB_NAME
    [[ ${SLURM_JOB_NUM_NODES:-} != "$nodes" ]] || unset SLURM_JOB_NUM_NODES
    unset SLURM_JOB_ID SLURM_PROCID SLURM_JOB_END_TIME
}

[[ -z ${SLURM_JOB_ID:-} ]] || leave_allocation
SLURM_JOB_NAME=${SLURM_JOB_NAME:-$(asked job-name)}
SLURM_JOB_NUM_NODES=${SLURM_JOB_NUM_NODES:-$(asked nodes)} # where sbatch will be given another --nodes
SLURM_ARRAY_TASK_ID=${SLURM_ARRAY_TASK_ID:-1}
RUN=${RUN:-$SLURM_JOB_NAME}
FOUND=0
CHECKED=("$@") # of the script: sbatch gets them too

begin_job() {
    check_settings
    MASTER_ADDR=FIRST_NODE MASTER_PORT=PORT # of the job, once it has nodes
    say "no job is started here, and none is submitted: what $0 would meet, seen from $(hostname)"
    say "its run, whatever run.name the config has: $1"
    # Partition, account, time: Slurm says what it thinks of them, and when the job could start.
    if command -v sbatch >/dev/null; then
        sbatch --test-only --nodes="$SLURM_JOB_NUM_NODES" "$0" ${CHECKED[@]+"${CHECKED[@]}"} || FOUND=2
    fi
    set +u
    [[ -z $SETUP ]] || source "$SETUP" || refuse "SETUP=$SETUP failed: its last command must end with 0"
    [[ -z $VENV ]] || source "$VENV/bin/activate"
    set -u
}

check_nodes() {
    local gpus
    [[ -z $CONTAINER ]] || { say "CONTAINER is set: the config is checked in the image, when the job starts"; return; }
    gpus=$(((SLURM_JOB_NUM_NODES - SPARES) * $(asked ntasks-per-node)))
    say "plan: does it fit $gpus GPUs"
    python3 -m vapo_megatron.cli plan "$@" ${DOCTOR_OVERRIDES[@]+"${DOCTOR_OVERRIDES[@]}"} --gpus "$gpus" || FOUND=2
}

run_step() {
    local name=$1
    shift
    if [[ $name = evaluate && -z $CONTAINER ]]; then
        say "evaluate: can problems and model be read"
        "$@" --check || FOUND=2
    elif [[ $name = check && -z $CONTAINER ]]; then
        say "train --check: config, model, data, templates, verifier and disk (GPUs are looked at in the job)"
        "$@" || FOUND=2
        STEP_CODE=0 # what else there is to see is shown, too
        return
    fi
    say "the job would run, in every task: $*"
    STEP_CODE=$FOUND
}

run_ranks() { run_step "$@"; }

end_job() {
    [[ $1 = 0 ]] && say "nothing was found: sbatch $0 submits it" || say "mend what stands above before you submit it"
    exit "$1"
}
