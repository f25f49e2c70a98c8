# Completion for bash: the program itself says what may follow.
_@stage@() {
  local words
  words=$("$1" --complete "${COMP_WORDS[@]:1:COMP_CWORD-1}" 2>/dev/null | cut -f 1)
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$2")
}
complete -o default -F _@stage@ @stage@
