# Sourced by train.sbatch, after launch/environment.sh: runs the steps of a Slurm job, and requeues the job where the run
# can go on: after SIGUSR1 (the time limit is near), a preemption, or a lost node. Otherwise the job ends with the code of
# the step: a run that is finished, refused or failed is not started again.

JOB=${SLURM_JOB_ID:-0}
START=$((${SLURM_RESTART_COUNT:-0} + 1))
STARTS=$((${MAX_RESTARTS:-20} + 1))
LOST=.cache/slurm-$JOB.lost # a line for each time that a node was lost: its name

say() { echo "megarl: $*" >&2; }

# of_job NAME: what `scontrol show job` says of this job.
of_job() { scontrol show job "$JOB" --oneliner | grep -o "\b$1=[^ ]*" | cut -d= -f2 | sed 's/(null)//'; }

nodes() { scontrol show hostnames "$1" | sort; }

nodes_lost() { sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --states=down,fail,no_respond --format=%N | sort -u; }
lost_twice() { [[ ! -f $LOST ]] || sort "$LOST" | uniq -d; }

# node_here, node_still_here: if the node of this script is lost, nobody takes the line away again.
node_here() { { mkdir -p .cache && echo "${SLURMD_NODENAME:-none}" >>"$LOST"; } 2>/dev/null || LOST=/dev/null; }
node_still_here() { [[ ! -f $LOST ]] || sed -i '$d' "$LOST"; }
forget_losses() { [[ ! -f $LOST ]] || rm -f "$LOST"; } # it may be /dev/null

# requeue WHY [NODES]: let Slurm start the job again, without these nodes.
requeue() {
    ((START < STARTS)) || fail "$1; the job was started $START times, and is not requeued (MAX_RESTARTS=$((STARTS - 1)))"
    say "$1; the job is requeued for start $((START + 1)) of at most $STARTS"
    trap '' TERM # which Slurm sends to all that runs in this script once the job is requeued
    scontrol requeue "$JOB" || exit "$CODE"
    [[ -z ${2:-} ]] || scontrol update JobId="$JOB" ExcNodeList="$2"
    exit 0
}

# begin_job: refuse a start too many, and leave nodes that were lost twice. Only now: it is Slurm that requeues a job whose
# node is lost.
begin_job() {
    local lost others
    CODE=1
    ((START <= STARTS)) || fail "start $START of job $JOB is one too many (MAX_RESTARTS=$((STARTS - 1)))"
    lost=$(comm -12 <(nodes "$SLURM_JOB_NODELIST") <(lost_twice) | paste -sd,)
    if [[ -n $lost ]]; then
        others=$(of_job ExcNodeList)
        requeue "$lost was lost twice and is left out" "$lost${others:+,$others}"
    fi
}

# run_step COMMAND...: returns if it ends with 0; otherwise requeues the job, or leaves with the step's code.
run_step() {
    local lost
    CODE=0
    node_here
    trap 'node_still_here; nodes_lost >>"$LOST"; exit 143' TERM # Slurm ends the job, or requeues it
    "$@" &
    wait $! || CODE=$?
    node_still_here
    lost=$(nodes_lost)
    [[ -z $lost ]] || echo "$lost" >>"$LOST"
    if ((CODE == 0)); then
        return
    elif [[ -n $lost ]]; then
        requeue "the job lost ${lost//$'\n'/, }"
    elif ((CODE == 138)); then
        requeue "the run was stopped by SIGUSR1"
    elif ((CODE == 143)) && [[ $(of_job PreemptTime) == [0-9]* ]]; then
        requeue "the job is preempted"
    fi
    forget_losses
    exit "$CODE"
}
