/* The slots of a lane (core/src/group/lane.h): no rank reads a slot after its owner has filled it for another epoch.
 *
 * RANKS ranks do CALLS collectives of one round each, with at most AHEAD of them started and not taken. A slot serves
 * epoch e and e + SLOTS. Before a rank fills it (reserve) every peer must have said that it is done with the earlier
 * epoch: in the header of a publication, or in the lane's own word when a collective is complete.
 *
 * -DNO_RESERVE leaves that out: then the assertion must fail, with two collectives more in flight than there are slots.
 */
#ifndef RANKS
#define RANKS 2
#endif
#define SLOTS 4
#define AHEAD 4
#define CALLS 7

typedef Lane {
  byte data[SLOTS];  /* what the slot holds: the epoch that it was filled for */
  byte epoch[SLOTS]; /* its header: published for this epoch */
  byte done;         /* all slots of peers up to this epoch have been read */
}
Lane lanes[RANKS];

proctype rank(byte self) {
  byte published = 0; /* epochs */
  byte taken = 0;
  byte peer;
  do
  :: published < CALLS && published - taken < AHEAD -> /* start one more: reserve, fill, publish */
#ifndef NO_RESERVE
     if
     :: published + 1 > SLOTS ->
        peer = 0;
        do
        :: peer == RANKS -> break
        :: peer < RANKS && peer == self -> peer++
        :: peer < RANKS && peer != self -> lanes[peer].done >= published + 1 - SLOTS; peer++
        od
     :: else
     fi;
#endif
     lanes[self].data[(published + 1) % SLOTS] = published + 1;
     lanes[self].epoch[(published + 1) % SLOTS] = published + 1;
     published++
  :: taken < published -> /* await everybody's, take, say so */
     peer = 0;
     do
     :: peer == RANKS -> break
     :: peer < RANKS && peer == self -> peer++
     :: peer < RANKS && peer != self ->
        lanes[peer].epoch[(taken + 1) % SLOTS] >= taken + 1;
        assert(lanes[peer].data[(taken + 1) % SLOTS] == taken + 1);
        peer++
     od;
     taken++;
     lanes[self].done = taken
  :: taken == CALLS -> break
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
