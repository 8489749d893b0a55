/* Signals (core/src/symm): a wait that is tried again after a timeout takes each signal once.
 *
 * A signal is a counter that only grows, with one writer. The waiter remembers how many it has taken; a wait is over when
 * the counter is beyond that. The waiter may give up at any time and wait again.
 *
 * -DPAD is the other design, a pad of 0 and 1 that the sender sets and the waiter resets by compare-and-swap, where a
 * sender that gives up and tries again cannot know whether its signal was taken: the waiter passes without one.
 */
#define SIGNALS 3
byte sent = 0;  /* by intent of the sender */
byte passed = 0; /* waits that were over */
#ifdef PAD
bit pad = 0;
#else
byte counter = 0;
#endif

active proctype sender() {
  do
  :: sent < SIGNALS ->
#ifdef PAD
     sent++;
     if
     :: atomic { pad == 0 -> pad = 1 }
     :: atomic { pad == 0 -> pad = 1 }; /* it was set, but the sender's time was over before it saw that */
        atomic { pad == 0 -> pad = 1 }  /* so it tries again */
     fi
#else
     sent++;
     if
     :: counter = sent
     :: counter = sent; counter = sent /* a store may be repeated: it says the same */
     fi
#endif
  :: else -> break
  od
}

active proctype waiter() {
  byte taken = 0;
end:
  do
#ifdef PAD
  :: atomic { pad == 1 -> pad = 0; taken++ }; passed++; assert(passed <= sent)
#else
  :: counter > taken -> taken++; passed++; assert(passed <= sent)
#endif
  :: taken < SIGNALS -> skip /* gives up, and waits again */
  :: taken == SIGNALS -> break
  od
}
