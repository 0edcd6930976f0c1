# What the batch scripts of this folder share: the life of a job, from one try to the next. They source it.
#
#   begin_job RUN_DIR PROGRESS   prepare a try, or end here where earlier tries came to nothing.
#                                PROGRESS is a folder: as long as its newest entry is the same, no try came to anything.
#   run_step NAME COMMAND...     run COMMAND in every task of the job and wait. How it ended is in STEP_CODE:
#                                0 done, 75 start again, 2 bad input, anything else a failure to look at.
#   run_ranks NAME COMMAND...    run_step, and again within this job where a task or a node was lost: a spare node takes
#                                the place of a lost one, and ranks go on from copies in the host memory of the nodes.
#   end_job CODE                 75: requeue this job; anything else: end with it.
#
# Signals, and what was found out about them with Slurm 22.05:
#   - Slurm sends USR1 to this shell alone (--signal=B:USR1@...), early and more than once. A trap runs only while the
#     shell waits, hence `srun ... & wait`.
#   - What is then sent to a step reaches *every* process in it. Engines and verifiers pass over USR1, what libraries
#     start may not. So tasks are sent URG, which processes ignore unless they ask for it; task.sh turns it into USR1
#     for its rank alone.
#   - A requeue sends TERM to this shell and its children, so it is ignored from then on.

set -uo pipefail

STEP_NAME= # of the step that runs, or ran last
ASKED=     # 1: to save and stop
LEFT_OUT=  # 1: this try ends because doctor found a node to leave out
ATTEMPT=0  # of a step: how often this try has begun it again
NODES=()   # that the step runs on, in their order; empty: all of the job
LOST=()    # nodes of the job that are not used any more

# ── begin ──────────────────────────────────────────────────────────────────────────────────────────────────────────

begin_job() {
    local end
    RUN_DIR=$1 PROGRESS=$2
    RECORD=$RUN_DIR.slurm # tries, excluded nodes and exit codes: what a person looks at when a job has stopped
    # The last job of an array has the id of the whole array: only this form means one of its jobs.
    JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    JOB=${JOB:-$SLURM_JOB_ID}
    RESTART=${SLURM_RESTART_COUNT:-0}
    ENDING=
    check_settings
    mkdir -p "$RECORD" && : >>"$RECORD/tries" || refuse "RUNS=$RUNS: $RECORD/tries cannot be written"
    trap on_usr1 USR1
    trap on_term TERM

    [[ $(tries_from_here) -lt $MAX_TRIES ]] || give_up
    echo "$(date +%FT%T) $SLURM_JOB_ID restart=$RESTART nodes=$SLURM_JOB_NODELIST from=$(latest_checkpoint)" >>"$RECORD/tries" ||
        refuse "RUNS=$RUNS: $RECORD/tries cannot be written"
    say "$SLURM_JOB_NAME: try $((RESTART + 1)) of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, from $(latest_checkpoint)"

    MASTER_ADDR=$(job_nodes | head -n 1)
    MASTER_PORT=$(free_port)
    [[ $SPARES -lt $SLURM_JOB_NUM_NODES ]] || refuse "SPARES=$SPARES: the job has $SLURM_JOB_NUM_NODES nodes; ask for more with --nodes"
    # The trainer saves in time before it. Slurm 22.05 does not set it; a job without a limit has no such time.
    end=$(job_field EndTime)
    if [[ $end == *T* ]]; then export SLURM_JOB_END_TIME=$(date -d "$end" +%s); fi
    KILL_WAIT=$(scontrol show config | sed -n 's/^KillWait *= *\([0-9]*\).*/\1/p')
    export MASTER_ADDR MASTER_PORT KILL_WAIT=${KILL_WAIT:-30} RESTART LOCAL_TMP VENV SETUP
    # Tasks get this environment even where `sbatch --export=NONE` was given, and srun the CPUs sbatch asked for.
    export SLURM_EXPORT_ENV=ALL
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-$(cores_of_a_task)}
}

check_settings() {
    [[ -z ${CONFIG:-} || -f $CONFIG ]] || refuse "CONFIG=$CONFIG: no such file, seen from $PWD"
    [[ -z $CONTAINER && -n $VENV && ! -f $VENV/bin/activate ]] && refuse "VENV=$VENV: is no virtual environment"
    # An image has its own.
    [[ -z $CONTAINER ]] || VENV=
    [[ -n $SETUP && ! -f $SETUP ]] && refuse "SETUP=$SETUP: no such file; it is sourced on every node"
    local name
    for name in MAX_TRIES DOCTOR_WAIT DOCTOR_LIMIT; do # evaluations and conversions have no doctor
        [[ ${!name-1} =~ ^[1-9][0-9]*$ ]] || refuse "$name=${!name}: expected a number of at least 1"
    done
    SPARES=${SPARES:-0} RESTARTS=${RESTARTS:-0} # nor spare nodes
    for name in SPARES RESTARTS; do
        [[ ${!name} =~ ^[0-9]+$ ]] || refuse "$name=${!name}: expected a number of at least 0"
    done
}

refuse() {
    echo "$SLURM_JOB_NAME: $1" >&2
    exit 2
}

say() { echo "== $(date +%FT%T) $*"; }

cores_of_a_task() { # the cores of the job's smallest node over its tasks: srun alone gives a task a single one
    local cores tasks=${SLURM_TASKS_PER_NODE:-1}
    cores=$(tr , '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-1}" | sed 's/(.*//' | sort -n | head -n 1) # 128(x15),64
    tasks=${tasks%%[!0-9]*}
    echo $((cores > tasks ? cores / tasks : 1))
}

ask_controller() { # COMMAND...: again where Slurm's controller does not answer, as while it is restarted
    local end=$((SECONDS + ${CONTROLLER_WAIT:-600})) said code
    local away='controller|[Tt]imed out|Zero Bytes|[Cc]onnection refused|Transport endpoint'
    while true; do
        { said=$("$@" 2>&1 >&3); code=$?; } 3>&1
        [[ -z $said ]] || echo "$said" >&2
        [[ $code != 0 && $said =~ $away && $SECONDS -lt $end ]] || return "$code"
        sleep 10
    done
}

job_field() { # FIELD [JOB]
    ask_controller scontrol show job --oneliner "${2:-$JOB}" | tr ' ' '\n' | sed -n "s/^$1=//p"
}

job_nodes() { scontrol show hostnames "$SLURM_JOB_NODELIST"; } # in the order of SLURM_NODEID

latest_checkpoint() {
    local newest
    # Whatever is still being written has a hidden name.
    newest=$(ls -1t "$PROGRESS" 2>/dev/null | head -n 1)
    [[ ! -f $PROGRESS/$newest ]] || newest+=:$(stat --format=%s "$PROGRESS/$newest")_bytes
    echo "${newest:-the_beginning}"
}

tries_from_here() { # tries of this job in a row that began where the next one would, and failed by themselves
    awk -v job="$SLURM_JOB_ID" -v from="from=$(latest_checkpoint)" \
        '$2 != job || $5 != from { tries = 0; next } $6 == "ended=75" { tries++ } END { print tries + 0 }' "$RECORD/tries"
}

record_end() { # of this try: a code; 75_by_slurm and 75_node_left_out (and none, where Slurm left no time) do not count
    sed -i "/ $SLURM_JOB_ID restart=$RESTART /s/\$/ ended=$1/" "$RECORD/tries"
}

give_up() {
    say "$MAX_TRIES tries in a row began at $(latest_checkpoint) and saved nothing: not tried again. What stopped them stands" \
        "above and in $RUN_DIR/logs; once that is mended, submit the job anew"
    exit 1
}

free_port() { # of this node, where rank 0 will listen; below the ports that the kernel hands out
    local port=$((15000 + SLURM_JOB_ID % 1800 * 8))
    while grep -qE "$(printf ':%04X [0-9A-F]+:0000 0A' $port)" /proc/net/tcp /proc/net/tcp6 2>/dev/null; do
        port=$((port + 1))
    done
    echo $port
}

# ── a step ─────────────────────────────────────────────────────────────────────────────────────────────────────────

run_step() {
    local name=$1 limit=() options=() runs setup
    shift
    STEP_NAME=$name
    EXITS=$RECORD/exits/$SLURM_JOB_ID.$RESTART.$name
    [[ $ATTEMPT = 0 ]] || EXITS+=.$ATTEMPT
    rm -rf "$EXITS"
    mkdir -p "$EXITS" || exit 2
    # A file a task and try: those of weeks of requeues would use up the file system's inodes.
    find "$RECORD/exits" -mindepth 1 -maxdepth 1 -mtime +3 -exec rm -rf {} +
    if [[ -n $ASKED ]]; then
        say "$name is not begun: this job was asked to stop"
        end_job 75
    fi
    if [[ $name = doctor ]]; then
        options+=(--ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=0)
        # Its own deadlines do not exist yet while it starts, from a file system that may be dead.
        limit=(timeout --kill-after=60 "$DOCTOR_LIMIT")
        options+=(--wait=$(((DOCTOR_LIMIT + 3) / 4)))
    elif [[ $name = check ]]; then
        options+=(--nodes=1 --ntasks=1 --ntasks-per-node=1)
        limit=(timeout --kill-after=60 900) # doctor, which comes next, names the node whose file system hangs
    else
        # Each task finds the cores near its GPU itself; a fixed share would leave rank 0's verifiers an eighth of a node.
        options+=(--kill-on-bad-exit=1 --cpu-bind=none)
    fi
    [[ ${#NODES[@]} = 0 ]] || options+=(--nodes=${#NODES[@]} --ntasks=$((${#NODES[@]} * TASKS_PER_NODE))
        --ntasks-per-node="$TASKS_PER_NODE" --nodelist="$(paste -sd , <(printf '%s\n' "${NODES[@]}"))")
    if [[ -n $CONTAINER ]]; then
        options+=(--container-image="$CONTAINER" --container-workdir="$PWD")
        runs=$(realpath -m "$RUNS")
        setup=${SETUP:+$(cd "$(dirname "$SETUP")" && pwd)}
        [[ $setup/ != "$PWD"/* ]] || setup=
        options+=(--container-mounts="$PWD:$PWD,$runs:$runs,$LOCAL_TMP:$LOCAL_TMP${setup:+,$setup:$setup}${MOUNTS:+,$MOUNTS}")
    fi
    "${limit[@]}" srun "${options[@]}" bash slurm/task.sh "$EXITS" "$@" &
    STEP=$!
    while kill -0 $STEP 2>/dev/null; do wait $STEP; done
    wait $STEP
    STEP_CODE=$(code_of_step $?)
    say "$name ended with code $STEP_CODE"
    [[ $STEP_CODE = 0 || -n $ENDING ]] || clean_nodes
}

run_ranks() {
    local left=$RESTARTS from lost
    # As many a node as sbatch was asked for, in whatever words; tasks find their node's copies by this.
    TASKS_PER_NODE=${SLURM_TASKS_PER_NODE%%(*}
    [[ $TASKS_PER_NODE =~ ^[0-9]+$ && $SLURM_TASKS_PER_NODE != *,* ]] || # 8(x2),4
        refuse "the nodes have $SLURM_TASKS_PER_NODE tasks, expected as many on each: ask for --ntasks-per-node"
    export VAPO_ATTEMPT
    COPIES=1
    while true; do
        from=$(latest_checkpoint) VAPO_ATTEMPT=$ATTEMPT
        choose_nodes || return
        run_step "$@"
        [[ -z $ENDING && -z $ASKED && $STEP_CODE = 75 ]] && lost_a_task || return
        [[ $(latest_checkpoint) = "$from" ]] || left=$RESTARTS
        [[ $left -gt 0 ]] || return
        lost=$(died_on)
        if [[ -n $lost && $(alive_nodes | grep -cvxF "$lost") -ge ${#NODES[@]} ]]; then
            exclude "$lost" "a task was killed by a signal, or its device or disk failed"
            LOST+=("$lost")
            on_alive_nodes "[[ \$SLURMD_NODENAME != $lost ]] || $FORGET_COPIES"
        elif [[ $(first_failure) = "76 "* ]]; then
            return # that node cannot be used again, and there is no spare
        fi
        left=$((left - 1)) ATTEMPT=$((ATTEMPT + 1))
        say "$1 is started again within this job (attempt $((ATTEMPT + 1))), from copies in host memory where they are whole"
    done
}

alive_nodes() { # of the job: Slurm takes off those that went down
    scontrol show hostnames "$(job_field NodeList | head -n 1)" | grep -vxFf <(printf '%s\n' - "${LOST[@]}")
}

choose_nodes() { # that train; fails where too few are left
    local alive
    mapfile -t alive < <(alive_nodes)
    if [[ ${#alive[@]} -lt $((SLURM_JOB_NUM_NODES - SPARES)) ]]; then
        say "${#alive[@]} of the job's nodes are left, $((SLURM_JOB_NUM_NODES - SPARES)) are needed"
        STEP_CODE=75
        return 1
    fi
    NODES=("${alive[@]:0:SLURM_JOB_NUM_NODES - SPARES}")
    MASTER_ADDR=${NODES[0]}
    MASTER_PORT=$(free_port)
}

lost_a_task() { # whether the step ended for want of a task (77), by a signal or a broken device, or with a node
    [[ -n $(died_on) ]] || grep -q '^77 ' "$EXITS"/* 2>/dev/null || printf '%s\n' "${NODES[@]}" | grep -qvxFf <(alive_nodes)
}

code_of_step() { # of a step, from the code of srun and from what its tasks recorded ("code node time", a file a task)
    # srun tells only the highest code of all tasks, those included that Slurm ended because of the first one.
    local code node
    read -r code node < <(first_failure) || :
    if [[ -z $code ]]; then
        # Only tasks that lost others failed, or none did: then a node or a launch has.
        [[ $1 = 0 ]] && echo 0 || echo 75
    elif [[ -n $(died_on) ]]; then
        echo 75
    else
        echo "$code"
    fi
}

first_failure() { # code and node of the task whose end explains the others', if there is one
    # 77 says that another task was lost, 75 that the run is saved or may be tried again; an abort (134) that is not the
    # first says it too: NCCL's watchdog aborts ranks whose peers are silent.
    sort -n -k 3,3 "$EXITS"/* 2>/dev/null | awk '
        $1 == 0 { next }
        { failures++ }
        $1 == 75 || $1 == 77 || ($1 == 134 && failures > 1) { next }
        { print $1, $2; exit }'
}

died_on() { # the node of the first failure, if a signal ended that task or its node was unfit (76)
    first_failure | awk '$1 >= 128 || $1 == 76 { print $2 }'
}

clean_nodes() { # what tasks left that were killed before they could clean up themselves
    on_alive_nodes 'rm -rf "$LOCAL_TMP/vapo-$SLURM_JOB_ID.$RESTART".*' # a node has another number in every step
}

on_alive_nodes() { # COMMAND, once on each; it must bear being run twice
    local alive gpus code
    mapfile -t alive < <(scontrol show hostnames "$(job_field NodeList | head -n 1)")
    # GPUs that a hanging step still holds are not waited for. Sites that want GPUs of every step refuse the first try.
    for gpus in --gpus-per-node=0 ""; do
        # On a node that is dead, and that Slurm still thinks is up, srun would wait on after TERM.
        timeout --kill-after=15 60 srun --overlap --nodes=${#alive[@]} --ntasks=${#alive[@]} --ntasks-per-node=1 $gpus \
            --nodelist="$(paste -sd , <(printf '%s\n' "${alive[@]}"))" bash -c "$1"
        code=$?
        [[ $code != 0 && $code != 124 && $code != 137 ]] || break
    done
    [[ $code = 0 ]] || say "srun failed with code $code on ${alive[*]}: what tasks left may still be there, in $LOCAL_TMP" \
        "and /dev/shm/vapo-job-$SLURM_JOB_ID.*"
}

# Of this try, on the node where it runs (task.sh names them).
FORGET_COPIES='rm -rf "/dev/shm/vapo-job-$SLURM_JOB_ID.$RESTART.$SLURMD_NODENAME"'

check_run() { # config, files, columns, templates and saved state, on one node, before any other waits for anything
    run_step check python3 -m vapo_megatron.cli train --check "$@"
    # Anything but bad input is a matter of that node: doctor says whose fault it is.
    [[ $STEP_CODE != 2 && -z ${ENDING:-} ]] || end_job "$STEP_CODE"
}

check_nodes() { # `doctor` with the arguments of `train` and DOCTOR_OVERRIDES; nodes with a fault are left out on the next try
    local options=() broken=$RECORD/broken_nodes node blamed
    [[ $DOCTOR != 0 ]] || return 0
    [[ $DOCTOR != quick ]] || options+=(--quick)
    rm -f "$broken"
    run_step doctor python3 -m vapo_megatron.cli doctor "$@" ${DOCTOR_OVERRIDES[@]+"${DOCTOR_OVERRIDES[@]}"} --broken-nodes "$broken" --wait "$DOCTOR_WAIT" \
        --node-names "$(job_nodes | paste -sd ,)" "${options[@]}"
    [[ $STEP_CODE != 0 ]] || return 0
    [[ -z $ENDING ]] || end_job "$STEP_CODE"
    mapfile -t blamed < <({ cat "$broken" 2>/dev/null; unfit_nodes; silent_nodes; } | sort -u)
    # What every node has is no node's fault, and what doctor finds in the only one may be the config's.
    if [[ ${#blamed[@]} -ge $SLURM_JOB_NUM_NODES && ($SLURM_JOB_NUM_NODES -gt 1 || -s $broken) ]]; then
        say "every node has a fault, so none of them is left out: see LOCAL_TMP, the config and the file systems"
        [[ -s $broken || -n $(unfit_nodes) ]] && end_job 1 || end_job 75
    fi
    [[ ${#blamed[@]} -gt 0 ]] || end_job "$STEP_CODE"
    for node in "${blamed[@]}"; do
        # A node that could not be left out last time, or that is the only one, must not be tried for ever.
        [[ $SLURM_JOB_NUM_NODES = 1 ]] || is_excluded "$node" || LEFT_OUT=1
        exclude "$node" "doctor found a fault, died or said nothing"
    done
    end_job 75
}

unfit_nodes() { # those where doctor could not start or was ended by a signal
    awk '$1 >= 128 || $1 == 76 { print $2 }' "$EXITS"/* 2>/dev/null
}

silent_nodes() { # those where doctor did not end by itself
    local silent
    mapfile -t silent < <(job_nodes | grep -vxFf <(cut -d ' ' -f 2 "$EXITS"/* 2>/dev/null))
    [[ ${#silent[@]} -gt 0 ]] || return 0
    # The first node waits for the others: it is to blame where it alone is silent, or all of them are.
    [[ ${#silent[@]} = 1 || ${#silent[@]} = "$SLURM_JOB_NUM_NODES" || ${silent[0]} != "$MASTER_ADDR" ]] ||
        silent=("${silent[@]:1}")
    printf '%s\n' "${silent[@]}"
}

# ── signals ────────────────────────────────────────────────────────────────────────────────────────────────────────

on_usr1() {
    ASKED=1 # doctor passes over it: the next step is not begun
    say "USR1: asking the run to save and stop"
    ask_controller scancel --signal=URG "$JOB"
}

on_term() {
    ENDING=1
    # Tasks that were sent TERM because the job ends take the copies in host memory along.
    [[ -z ${EXITS:-} ]] || : >"$EXITS/.over"
    # The tasks were sent TERM as well. A run that did not save in time goes on from its last checkpoint.
    if [[ $(job_field Reason) = TimeLimit ]]; then
        say "the time limit was reached; what was not saved by then is done again (--signal=B:USR1@SECONDS gives it longer)"
        end_job 75
    fi
}

# ── end ────────────────────────────────────────────────────────────────────────────────────────────────────────────

end_job() {
    local node=
    # Nothing begins from them any more. Tasks that ended with 0 have taken theirs along.
    [[ -z ${COPIES:-} || -n $ENDING || $1 = 0 ]] || on_alive_nodes "$FORGET_COPIES"
    if [[ $1 != 75 ]]; then
        record_end "$1"
        exit "$1"
    fi
    [[ $STEP_NAME = doctor ]] || node=$(died_on)
    [[ -z $node ]] || exclude "$node" "a task was killed by a signal, or its device or disk failed"
    if [[ -n $ENDING && $(job_field Reason) != TimeLimit ]]; then
        # Cancelled, or requeued by Slurm itself (preempted, a node failed).
        record_end 75_by_slurm
        exit 75
    fi
    if ! record_end "$(how_it_ended)"; then
        # A file system that fails for good fails the run's saves as well: uncounted, such tries would never end.
        say "$RECORD/tries cannot be written, so tries that come to nothing cannot be counted: not tried again. Once that" \
            "file system is mended, submit the job anew"
        exit 1
    fi
    [[ $REQUEUE = 1 ]] || exit 75
    [[ $(tries_from_here) -lt $MAX_TRIES ]] || give_up
    trap '' TERM
    ask_controller scontrol requeue "$JOB" || exit 75
    leave_out_excluded
    exit 75
}

how_it_ended() {
    if [[ -n $LEFT_OUT ]]; then
        echo 75_node_left_out
    elif ask_controller sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --states=down,fail --format=%N 2>/dev/null | grep -q .; then
        echo 75_by_slurm
    else
        echo 75
    fi
}

exclude() { # NODE REASON: left out on the next tries of this run
    say "$1 is left out on the next try: $2 (recorded in $RECORD/excluded_nodes)"
    echo "$1 $(date +%FT%T) job $SLURM_JOB_ID: $2" >>"$RECORD/excluded_nodes"
}

is_excluded() { cut -d ' ' -f 1 "$RECORD/excluded_nodes" 2>/dev/null | grep -qxF "$1"; }

leave_out_excluded() { # this job, now pending again, and those waiting behind it under the same name
    local nodes all job present
    nodes=$(cut -d ' ' -f 1 "$RECORD/excluded_nodes" 2>/dev/null | sort -u | paste -sd ,)
    [[ -n $nodes ]] || return 0
    all=$(with_own_exclusions "$JOB" "$nodes")
    present=$(ask_controller sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --states=idle,alloc,mix,comp --format=%N |
        sort -u | grep -cvxFf <(tr , '\n' <<<"$all"))
    if [[ $present -lt $SLURM_JOB_NUM_NODES ]]; then
        say "without $all only $present nodes would be left, $SLURM_JOB_NUM_NODES are needed: $nodes not left out"
        return 0
    fi
    # --array: one by one, as scontrol takes no 42_[3-9%2].
    for job in "$JOB" $(ask_controller squeue --noheader --array --me --name="$SLURM_JOB_NAME" --states=PENDING --format=%i); do
        ask_controller scontrol update JobId="$job" ExcNodeList="$(with_own_exclusions "$job" "$nodes")"
    done
}

with_own_exclusions() { # JOB NODES: NODES and those that the job leaves out already, by `sbatch --exclude`
    local own
    own=$(job_field ExcNodeList "$1" | head -n 1)
    [[ $own != "(null)" ]] || own=
    { tr , '\n' <<<"$2"; [[ -z $own ]] || scontrol show hostnames "$own"; } | sort -u | paste -sd ,
}

# Started with bash, perhaps in an allocation of salloc: what sbatch submits runs as a copy named slurm_script.
[[ -n ${SLURM_JOB_ID:-} && $0 != *.sbatch ]] || source slurm/check.sh
