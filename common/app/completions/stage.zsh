#compdef @stage@
# Completion for zsh: the program itself says what may follow.
local -a following before
before=("${(@)words[2,CURRENT-1]}")
if [[ $words[CURRENT] == --*=* ]]; then
  before+=("${words[CURRENT]%%=*}")
  compset -P '*='
fi
following=(${(f)"$($words[1] --complete "${(@)before}" 2>/dev/null)"})
if (( $#following )); then
  following=(${${following//:/\\:}/$'\t'/:})
  _describe @stage@ following
else
  _files
fi
