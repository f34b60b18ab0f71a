"""Engine steps: what do hooks and a busy client cost each?"""
