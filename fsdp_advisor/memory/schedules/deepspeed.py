class DeepspeedSchedule:
    def __init__(self, *a): pass
