/* Going to sleep (core/src/wait): no sleeper is left behind by a publication.
 *
 * The publisher stores a word and then looks whether somebody sleeps; its store waits in a store buffer (x86's memory
 * order) until it is flushed, at any time. The sleeper announces itself, makes every other core flush (membarrier), and
 * looks at the word once more before it sleeps on the futex, which does not sleep if the word has changed.
 *
 * -DNO_FENCE leaves the flush out: then the sleeper can be left behind, an invalid end state.
 */
bit word = 0;     /* as everybody sees it */
bit buffered = 0; /* the publisher's store, not seen by others yet */
byte sleepers = 0;
bit asleep = 0;

active proctype publisher() {
  buffered = 1;
  if /* the load of `sleepers` does not wait for the buffer */
  :: sleepers != 0 -> atomic { word = 1; buffered = 0 }; asleep = 0 /* wake_all: a system call, which flushes */
  :: sleepers == 0
  fi
}

active proctype flusher() { /* the buffer drains by itself, some time */
  do
  :: atomic { buffered == 1 -> word = 1; buffered = 0 }
  :: word == 1 -> break
  od
}

active proctype sleeper() {
  do
  :: word == 1 -> break
  :: else ->
     sleepers++;
#ifndef NO_FENCE
     atomic { if :: buffered == 1 -> word = 1; buffered = 0 :: else fi };
#endif
     if
     :: word == 1 -> sleepers--; break
     :: else ->
        atomic { if :: word == 0 -> asleep = 1 :: else fi }; /* futex_wait compares and sleeps in one step */
        asleep == 0; /* until somebody wakes it: no time limit here, in the code a slice of milliseconds */
        sleepers--
     fi
  od
}
