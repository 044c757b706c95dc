"""Prints the script with which a shell completes the words of ``zeropp``.

    source <(zeropp completion bash)    in ~/.bashrc, or zsh in ~/.zshrc

All words stand in the script, so that completing starts no Python.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields

from benchmarks.show import Request
from benchmarks.specification import CONF
from benchmarks.specification.command import CommandParser, command
from zeropp.__main__ import offered
from zeropp.schedule.build import GENERATORS

_BASH = """\
_zeropp() {
  local word="${COMP_LINE:0:COMP_POINT}" command="${COMP_WORDS[1]}" words=""
  word="${word##* }"
  if [ "$COMP_CWORD" = 1 ]; then words="$COMMANDS"
  else case "$command $word" in
$CASES
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "${word#*=}"))
  case "$word" in *=*) ;; *) [[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace ;; esac
}
complete -o default -F _zeropp zeropp
"""
_ZSH = """\
_zeropp() {
  local -a found; local words_of="" word="$PREFIX" command="${words[2]}"
  if (( CURRENT == 2 )); then words_of="$COMMANDS"
  else case "$command $word" in
$CASES
    esac
  fi
  [[ "$word" == *=* ]] && compset -P '*='
  found=(${=words_of})
  compadd -S '' -- ${(M)found:#*=}
  compadd -- ${found:#*=} || _files
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _zeropp zeropp
"""


@command
def main() -> int:
    """Print the script for one shell; returns the exit status."""
    parser = CommandParser(prog="zeropp completion", description=__doc__)
    parser.add_argument("shell", choices=("bash", "zsh"))
    shell = parser.parse_args(sys.argv[1:]).shell
    variable, script = ("words", _BASH) if shell == "bash" else ("words_of", _ZSH)
    known = [(f'"{start}"*', words) for start, words in _cases()]
    options = [case for case in known if "=" in case[0]]
    keys = [case for case in known if case not in options]
    ordered = [*options, ("*=*", ""), *keys]  # a key without known options is no key to complete
    cases = [f'      {start}) {variable}="{words}" ;;' for start, words in ordered]
    script = script.replace("$COMMANDS", " ".join(offered()))
    print(script.replace("$CASES", "\n".join(cases)), end="")
    return 0


def _cases() -> Iterator[tuple[str, str]]:
    """(a command and the beginning of its last word, what may follow)."""
    from omegaconf import OmegaConf

    from benchmarks.explain.question import KEYS
    from benchmarks.specification.compose import groups_of, options_of
    from benchmarks.specification.contenders import PRICED

    for name, config in (("run", "config"), ("tune", "tune")):
        keys = {str(key) for key in OmegaConf.load(CONF / f"{config}.yaml")} - {"defaults"}
        groups = groups_of(config)
        yield from ((f"{name} {group}=", " ".join(options_of(group))) for group in groups)
        yield f"{name} ", " ".join(f"{key}=" for key in sorted({*groups, *keys}))
    yield "explain cluster=", " ".join(options_of("cluster"))
    yield "explain contender=", " ".join(PRICED)
    yield "explain ", " ".join(f"{key}=" for key in KEYS)
    yield "show name=", " ".join(GENERATORS)
    yield "show ", " ".join(["schedule", *(f"{field.name}=" for field in fields(Request))])
    yield "completion ", "bash zsh"


if __name__ == "__main__":
    sys.exit(main())
