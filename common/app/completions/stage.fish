# Completion for fish: the program itself says what may follow.
function __@stage@_following
    set --local words (commandline --tokenize --cut-at-cursor --current-process)
    set --local option (string match --regex -- '^--[^=]+=' (commandline --current-token --cut-at-cursor))
    set --local following ($words[1] --complete $words[2..-1] (string trim --right --chars== -- $option) 2>/dev/null)
    if set --query following[1]
        printf "$option%s\n" $following
    else
        __fish_complete_path (commandline --current-token)
    end
end
complete --command @stage@ --no-files --arguments '(__@stage@_following)'
