/* Lists of calls of which some have inputs in symmetric memory, and calls of which only the root has an input
 * (core/src/ops/zero_copy.cpp): every rank decides the same, nobody takes a table for data or data for a table, reads
 * memory whose owner has gone on, or waits for a rest that another rank does not have.
 *
 * RANKS ranks make a list of two calls: to one, all give an input; to the other, rank 0 alone does. As it happens, a
 * rank has each of its inputs in symmetric memory, and then a table of them in its slot (kind 2); or it has none, but
 * would read that of rank 0 (1); or neither (0): then its slot has the data of the whole list. After everybody has
 * arrived, all look at all kinds. A 0 among them, or no 2: tables make way for the list. Otherwise each call is done
 * directly if the tables say that everybody can. A rank may find then that it has freed what it needs to read from rank
 * 0; it says so in a second arrival. What is not done directly follows, as a list of its own, or else just an arrival.
 * With no input of the first call this is a broadcast, or a scatter.
 *
 * -DNO_MISSING: a rank that misses the input of rank 0 keeps it to itself. -DNO_CLOSING: no arrival follows if all is
 * done. -DNO_TURN: tables make way without a word of it. Then an assertion must fail, or somebody waits for ever.
 */
#ifndef RANKS
#define RANKS 2
#endif

byte kind[RANKS];
bool own[RANKS];     /* the table has the input of the first call */
bool from_0[RANKS];  /* the second call: rank 0 has its input there, another would read it */
bool table[RANKS];   /* what the slot has: a table, or data */
bool arrived[RANKS]; /* first, second and last epoch */
bool missed[RANKS], told[RANKS];
bool rest_1[RANKS], rest_2[RANKS], closed[RANKS];
bool staged[RANKS];  /* the slot has data; the word that says so */
bool written[RANKS]; /* the owner has gone on and changed its inputs */

#define AWAIT(words) \
  peer = 0; \
  do \
  :: peer < RANKS -> words[peer]; peer++ \
  :: else -> break \
  od

proctype rank(byte self) {
  byte peer = 0;
  bool go = true, some = false, both = true, first = true, second = true, misses = false;

  if
  :: own[self] = true
  :: own[self] = false
  fi;
  if
  :: from_0[self] = true
  :: from_0[self] = false
  fi;
  if
  :: own[self] || (self == 0 && from_0[self]) -> kind[self] = 2; table[self] = true
  :: else ->
     kind[self] = from_0[self];
     staged[self] = true
  fi;
  arrived[self] = true;
  AWAIT(arrived);

  atomic {
    peer = 0;
    do
    :: peer < RANKS ->
       go = go && kind[peer] != 0;
       some = some || kind[peer] == 2;
       peer++
    :: else -> break
    od
  };
  if
  :: go && some ->
     peer = 0;
     do
     :: peer < RANKS ->
        assert(kind[peer] != 2 || table[peer]);
        first = first && kind[peer] == 2 && own[peer];
        second = second && from_0[peer] && (peer != 0 || kind[peer] == 2);
        peer++
     :: else -> break
     od;
     if
     :: second && self != 0 ->
        if
        :: misses = false; assert(!written[0])
        :: misses = true
        fi
     :: else
     fi;
     peer = 0;
     do
     :: peer < RANKS -> assert(!first || !written[peer]); peer++
     :: else -> break
     od;
     if
     :: second ->
#ifdef NO_MISSING
        second = !misses;
        told[self] = true;
        AWAIT(told)
#else
        missed[self] = misses;
        told[self] = true;
        AWAIT(told);
        peer = 0;
        do
        :: peer < RANKS -> second = second && !missed[peer]; peer++
        :: else -> break
        od
#endif
        ;
        both = first && second
     :: else ->
#ifdef NO_CLOSING
        both = first
#else
        both = false
#endif
     fi;
     if
     :: both
     :: else ->
        rest_1[self] = !first;
        rest_2[self] = !second;
        closed[self] = true;
        peer = 0;
        do
        :: peer < RANKS ->
           closed[peer];
           assert(rest_1[peer] == !first && rest_2[peer] == !second);
           peer++
        :: else -> break
        od
     fi
  :: else ->
     if
     :: table[self] ->
        table[self] = false;
        staged[self] = true
     :: else
     fi;
     peer = 0;
     do
     :: peer < RANKS ->
#ifndef NO_TURN
        staged[peer];
#endif
        assert(!table[peer]);
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
