/* Revoking a group (core/src/group/failure.cpp): when a rank dies, every survivor's wait ends, also one that begins while
 * the news spread, and none waits for ever.
 *
 * The monitor of each rank stores the interruption and then wakes whoever sleeps on a word of a peer. A waiter looks at
 * the word and at the interruption before it sleeps. The word never comes: its owner is dead.
 *
 * -DNO_SLICE takes away the time limit of a sleep: then a wake-up between the look and the sleep is lost, as the word on
 * which the waiter sleeps has not changed, and it sleeps for ever. -DWAKE_FIRST lets the monitor wake before it stores;
 * the time limit makes up for that too.
 */
#define SURVIVORS 2
bit interrupted[SURVIVORS];
bit asleep[SURVIVORS];
byte ended = 0;

proctype monitor(byte self) {
#ifdef WAKE_FIRST
  asleep[self] = 0;
  interrupted[self] = 1
#else
  interrupted[self] = 1;
  asleep[self] = 0
#endif
}

proctype waiter(byte self) {
  do
  :: interrupted[self] == 1 -> break
  :: interrupted[self] == 0 ->
     asleep[self] = 1; /* between the look and the sleep the monitor may have come */
#ifdef NO_SLICE
     asleep[self] == 0
#else
     if
     :: asleep[self] == 0
     :: asleep[self] = 0 /* the slice is over */
     fi
#endif
  od;
  ended++
}

init {
  byte i = 0;
  atomic {
    do
    :: i < SURVIVORS -> run monitor(i); run waiter(i); i++
    :: else -> break
    od
  };
  ended == SURVIVORS
}
