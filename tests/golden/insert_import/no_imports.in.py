# a comment
x = 1
