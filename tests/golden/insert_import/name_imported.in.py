from pack._leangrpo import lean
