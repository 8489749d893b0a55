/* Inputs that are read where they lie (core/src/ops/engine.cpp, use_places): every rank decides alike, and nobody
 * reads a slot that is empty, or memory whose owner has gone on.
 *
 * RANKS ranks do one collective after another, for ever. Epochs are counted modulo MODULUS, as in memory modulo 2^32, and
 * compared as there (`reached`); each epoch uses one of two slots. For each collective a rank has its input in ordinary
 * memory (place 0) or in one of two symmetric allocations (1, 2), as it happens. With a place, it publishes an empty slot.
 * After everybody has arrived, all look at all places: alike and not 0, the inputs are read where they lie, and a second
 * arrival, which is an epoch of its own, says that all have been read. Otherwise who has published an empty slot fills it
 * and says so in `staged`, and all wait for that. Then each rank writes to its input.
 *
 * A rank that publishes an empty slot keeps `staged` one epoch behind. Collectives that read where inputs lie take two
 * epochs each, so the first ones always have the same slot, and nothing else would write its `staged`.
 *
 * -DCLEARED: who fills its slot late takes its place back at once, so that others see another set of places. That is as
 * good, as places that differ never become alike by it.
 * -DONE_ALLOCATION leaves out place 2, so that three ranks have few enough states.
 * -DNO_WAIT leaves out the wait for what is filled late, -DNO_CLOSING the second arrival, -DSTALE does not write `staged`
 * with an empty slot: then an assertion must fail.
 */
#ifndef RANKS
#define RANKS 2
#endif
#define MODULUS 8
#define SLOTS 2
#define reached(a, b) (((a) - (b) + MODULUS) % MODULUS < MODULUS / 2)
#ifdef NO_WAIT
#define STAGED(rank) true
#else
#define STAGED(rank) reached(staged[SLOT(rank)], epoch)
#endif
#define SLOT(rank) ((rank) * SLOTS + epoch % SLOTS)

byte place[RANKS * SLOTS];
byte published[RANKS * SLOTS]; /* epoch of the slot */
byte staged[RANKS * SLOTS];
byte done[RANKS];              /* epochs of which the rank reads nothing any more */
bool filled[RANKS * SLOTS];    /* the slot has the data of its epoch */
bool written[RANKS];           /* the owner has gone on and changed its input */

inline publish(where) {
  atomic {
    epoch = (epoch + 1) % MODULUS;
    peer = 0;
    do
    :: peer < RANKS -> reached(done[peer], (epoch + MODULUS - SLOTS) % MODULUS); peer++
    :: else -> break
    od;
    place[SLOT(self)] = where;
    filled[SLOT(self)] = (where == 0);
    if
    :: where == 0 -> staged[SLOT(self)] = epoch
    :: else ->
#ifndef STALE
       staged[SLOT(self)] = (epoch + MODULUS - 1) % MODULUS
#endif
    fi;
    published[SLOT(self)] = epoch /* written last, with release */
  }
}

inline await() {
  peer = 0;
  all_staged = true;
  do
  :: atomic {
       peer < RANKS && reached(published[SLOT(peer)], epoch) ->
       all_staged = all_staged && (peer == self || reached(staged[SLOT(peer)], epoch));
       peer++
     }
  :: atomic { peer == RANKS -> peer = 0; break }
  od
}

proctype rank(byte self) {
  byte epoch = 0, peer = 0;
  bool alike, all_staged;
  do
  :: written[self] = false;
     if
     :: publish(0)
     :: publish(1)
#ifndef ONE_ALLOCATION
     :: publish(2)
#endif
     fi;
     await();

     alike = (place[SLOT(self)] != 0);
     do
     :: atomic { alike && peer < RANKS -> alike = (place[SLOT(peer)] == place[SLOT(self)]); peer++ }
     :: atomic { else -> peer = 0; break }
     od;

     if
     :: alike ->
        do
        :: atomic { peer < RANKS -> assert(!written[peer]); peer++ } /* reads it where it lies */
        :: atomic { else -> peer = 0; break }
        od;
#ifndef NO_CLOSING
        publish(0);
        await()
#endif
     :: else ->
        if
        :: !filled[SLOT(self)] ->
           filled[SLOT(self)] = true;
           staged[SLOT(self)] = epoch;
#ifdef CLEARED
           place[SLOT(self)] = 0
#endif
        :: else
        fi;
        do
        :: atomic {
             peer < RANKS && (all_staged || STAGED(peer)) -> assert(filled[SLOT(peer)]); /* reads the slot */
             peer++
           }
        :: atomic { peer == RANKS -> peer = 0; break }
        od
     fi;
     atomic { written[self] = true; done[self] = epoch; all_staged = false; alike = false }
  od
}

init {
  byte i = 0;
  atomic {
    do
    :: i < RANKS -> run rank(i); i++
    :: else -> break
    od
  }
}
