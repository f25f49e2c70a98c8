# Completion for bash: the program itself says what may follow.
_@stage@() {
  # Bash takes the "=" of "--slots=64" for a word.
  local word words before=() current=${COMP_WORDS[COMP_CWORD]#=}
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    [[ $word == = ]] || before+=("$word")
  done
  words=$("$1" --complete "${before[@]}" 2>/dev/null | cut -f 1)
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}
complete -o default -F _@stage@ @stage@
