"""Operations that need speed, each in its folder with a slow twin that says what it means."""
