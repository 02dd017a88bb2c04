# Sourced by the launchers: messages, checks of flags, and commands that --dry_run prints instead of running them.
# The launchers share one grammar: their own flags, then --config=FILE, from where on all goes to experiments.train.
# shellcheck shell=bash
set -euo pipefail
unset CDPATH
dry_run=${dry_run:-0}
# A port that nothing else on a TPU VM, in a pod or on a node of one's own listens on.
# shellcheck disable=SC2034
coordinator_port=8476

fail() {
  echo "error: $*" >&2
  exit 2
}

say() {
  echo "launch: $*" >&2
}

# need_program NAME HINT
need_program() {
  ((dry_run)) || command -v "$1" >/dev/null || fail "$1 is not on PATH; $2"
}

# whole_number FLAG VALUE [LEAST]
whole_number() {
  if [[ ! $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || (($2 < ${3:-0})); then
    fail "$1 is '$2'; it must be a whole number from ${3:-0}"
  fi
}

# needed FLAG VALUE
needed() {
  [[ -n $2 ]] || fail "$1 is missing"
}

no_such_flag() {
  fail "unknown flag '$1'; flags of experiments.train come after --config=FILE. $2"
}

# How to type a command so that a shell sees the same words.
quoted() {
  local word between='' quote="'\"'\"'"
  for word; do
    if [[ ! $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then word="'${word//\'/$quote}'"; fi
    printf '%s%s' "$between" "$word"
    between=' '
  done
}

# run COMMAND...: with --dry_run prints it, else runs it.
run() {
  if ((dry_run)); then
    quoted "$@"
    echo
  else
    "$@"
  fi
}

# How a status reads that `wait` gave.
described() {
  local signal
  if (($1 > 128)) && signal=$(kill -l $(($1 - 128)) 2>/dev/null); then
    echo "was ended by SIG$signal"
  else
    echo "failed with status $1"
  fi
}
