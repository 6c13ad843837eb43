def step(a):
    for lean_rows in a:
        print(lean_rows)
