/* Inputs that are read where they lie (core/src/collectives/engine.cpp, use_places): every rank decides alike, and nobody
 * reads a slot that is empty, or memory whose owner has gone on.
 *
 * RANKS ranks do one collective, and then write to their inputs. Each has its input in ordinary memory (place 0) or in
 * one of two symmetric allocations (1, 2), as it happens. With a place, a rank publishes an empty slot. After everybody
 * has arrived, all look at all places: alike and not 0, the inputs are read where they lie, and a second arrival says
 * that all have been read. Otherwise who has published an empty slot fills it and says so, and all wait for that.
 *
 * -DCLEARED: who fills its slot late takes its place back at once, so that others see another set of places. That is as
 * good, as places that differ never become alike by it.
 * -DNO_WAIT leaves out the wait for what is filled late, -DNO_CLOSING the second arrival: then an assertion must fail.
 */
#ifndef RANKS
#define RANKS 2
#endif

byte place[RANKS];
bool arrived[RANKS], closed[RANKS]; /* first and second epoch */
bool filled[RANKS];                 /* the slot has data */
bool staged[RANKS];                 /* the word that says so */
bool written[RANKS];                /* the owner has gone on and changed its input */

proctype rank(byte self) {
  byte peer = 0;
  bool alike = true;
  if
  :: place[self] = 0
  :: place[self] = 1
  :: place[self] = 2
  fi;
  if
  :: place[self] == 0 -> filled[self] = true; staged[self] = true
  :: else
  fi;
  arrived[self] = true;
  do
  :: peer < RANKS -> arrived[peer]; peer++
  :: else -> break
  od;

  alike = place[self] != 0;
  peer = 0;
  do
  :: peer < RANKS ->
     alike = alike && place[peer] == place[self];
     peer++
  :: else -> break
  od;

  if
  :: alike ->
     peer = 0;
     do
     :: peer < RANKS -> assert(!written[peer]); peer++ /* reads it where it lies */
     :: else -> break
     od;
     closed[self] = true;
#ifndef NO_CLOSING
     peer = 0;
     do
     :: peer < RANKS -> closed[peer]; peer++
     :: else -> break
     od
#endif
  :: else ->
     if
     :: !filled[self] ->
        filled[self] = true;
        staged[self] = true;
#ifdef CLEARED
        place[self] = 0
#endif
     :: else
     fi;
     peer = 0;
     do
     :: peer < RANKS ->
#ifndef NO_WAIT
        staged[peer];
#endif
        assert(filled[peer]); /* reads the slot */
        peer++
     :: else -> break
     od
  fi;
  written[self] = true
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
