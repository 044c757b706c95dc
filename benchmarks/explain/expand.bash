# Read by a restricted bash before a script that is to be expanded. No command outside of bash runs
# but cut and tr, and no file is written; the words of every command that would have run go to the standard output,
# each ended by a NUL, and the command by the word \1: an empty one is an argument.

exec 9>&1 >/dev/null
ulimit -t 5 -f 10240 -v 2000000
enable -n kill history fc suspend
_folder=$PWD  # that of the script
BASH_SOURCE_=$PWD/script.sh  # bash has a copy of it
set -o functrace
trap wait EXIT  # for what was sent to the background

command_not_found_handle() {
    local words=("$@") before= script=
    while (($#)); do
        [[ $1 != *.py ]] || script=$1  # what follows is its own
        if [[ $1 == -*([!-])c && (${before##*/} == @(bash|sh) ||
            (-z $script && ${2-} == *.py[[:space:]]*)) ]]; then
            printf '%s\0' "${words[@]:0:${#words[@]}-$#}" -c $'\1' >&9  # the launcher
            eval "$2"  # what its shell would run
            return
        fi
        before=$1
        shift
    done
    printf '%s\0' "${words[@]}" $'\1' >&9
}

# Sets _file: what lies beside the script, or in a folder from there, wherever its path begins.
_beside() {
    _file=$1
    [[ $_file == /* ]] || _file=$PWD/$_file
    _file=${_file#/}
    while [[ ! -f $_file && $_file == */* ]]; do
        _file=${_file#*/}
    done
    [[ -f $_file ]] || printf '%s\0' "${FUNCNAME[1]}" "$1" $'\1' >&9
    [[ -f $_file ]]
}

source() {
    local _file _text
    if _beside "$1"; then
        local BASH_SOURCE_=$_folder/$_file
        _text=$(<"$_file")
        shift
        eval "${_text//BASH_SOURCE/BASH_SOURCE_}"
    fi
}

.() { source "$@"; }

exit() {  # a check of another machine fails here, and what follows is still the configuration
    ((${1-0} == 0)) && builtin exit
    printf '%s\0' exit "$1" $'\1' >&9
}

exec() { (($#)) && command_not_found_handle "$@"; }
cat() {  # a document within the script, and files as `$(<FILE)` does
    local _file _name
    ((BASH_SUBSHELL)) || return 0  # at the top, what it prints is no argument
    for _name in "${@:--}"; do
        if [[ $_name == - ]]; then
            printf '%s\n' "$(</dev/stdin)"
        elif [[ $_name != -* ]] && _beside "$_name"; then
            printf '%s\n' "$(<"$_file")"
        fi
    done
}
cd() {  # in name only
    local place=${*: -1}
    [[ $# == 0 || $place == - ]] && return
    [[ $place == /* ]] && PWD=$place || PWD=$PWD/$place
}
pwd() { printf '%s\n' "$PWD"; }
pushd() { :; }
popd() { :; }
realpath() { printf '%s\n' "${*: -1}"; }
readlink() { realpath "$@"; }
basename() {
    local name=${1##*/}
    printf '%s\n' "${name%"${2-}"}"
}
dirname() {
    local path=${*: -1}
    [[ $path == */* ]] && printf '%s\n' "${path%/*}" || printf '.\n'
}

# Before each command: without what a restricted shell refuses, which is files for output, names
# with a slash, and some variables; and without `set -e`, which would end at a skipped command.
_expanded() {
    BASH_ARGV0=$_folder/script.sh
    local file='[ ][0-9]*(&?>>?|>\|)[ ]?[^ &][^ ]*((([ ][0-9]*[<>]&[0-9-]+))*)$'
    local value="(\"[^\"]*\"|'[^']*'|[^ \"'(\`]*)"
    local path="^(([A-Za-z_0-9]+=$value )*)(\"[^\"]*/[^\"]*\"|[^] \"'=([]*/[^ =(]*)( .*)?$"
    local fixed='^(export |declare -x )?(PATH|SHELL|ENV|BASH_ENV|HISTFILE)=|^set [-+][^-]'
    local command=$1
    shopt -s extdebug  # a trap that fails skips the command; not before, where it starts a debugger
    [[ $command =~ $fixed ]] && return 1
    local first=${command%%$'\n'*}
    [[ $first == *'<<'* && $first == *[0-9\ ]'>'* ]] && return 1  # a document into a file
    while [[ $command =~ $file ]]; do
        local quotes=${BASH_REMATCH[0]//[^\"]/}
        ((${#quotes} % 2)) && break  # it stands in a text
        [[ ${BASH_REMATCH[0]} == *')' && ${BASH_REMATCH[0]} != *'('* ]] && break  # or in $( )
        command=${command%"${BASH_REMATCH[0]}"}${BASH_REMATCH[2]}
    done
    if [[ $command =~ $path ]]; then
        command="${BASH_REMATCH[1]}command_not_found_handle ${BASH_REMATCH[4]}${BASH_REMATCH[5]}"
    fi
    [[ $command == "$1" ]] && return 0
    eval "$command"
    return 1
}
trap '_expanded "$BASH_COMMAND"' DEBUG
