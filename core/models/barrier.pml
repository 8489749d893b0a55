/* The barrier (core/src/symm, and every collective): nobody leaves the k-th before everybody has come to it, also when
 * somebody gave up waiting and came back.
 *
 * Each rank owns a word that counts the barriers it has come to; it leaves when all words have reached its own. A wait
 * that gives up leaves the counts as they are, and the next wait goes on with the same barrier.
 *
 * -DRESET is the other design, one flag for each pair that the waiter sets back: a rank that gives up and comes again
 * sets flags a second time that were taken already, and everybody waits for ever.
 */
#define RANKS 3
#define BARRIERS 3
byte came[RANKS]; /* to so many, by intent */
#ifdef RESET
bit flag[RANKS * RANKS]; /* [from * RANKS + to] */
#else
byte word[RANKS];
#endif

inline check(k) {
  byte r = 0;
  do
  :: r < RANKS -> assert(came[r] >= k); r++
  :: else -> break
  od;
  r = 0
}

proctype rank(byte self) {
  byte k = 0;
  byte peer;
  do
  :: k == BARRIERS -> break
  :: k < BARRIERS ->
     k++;
     came[self] = k;
#ifdef RESET
again:
     peer = 0;
     do
     :: peer < RANKS && peer == self -> peer++
     :: peer < RANKS && peer != self -> atomic { flag[self * RANKS + peer] == 0 -> flag[self * RANKS + peer] = 1 }; peer++
     :: peer == RANKS -> break
     od;
     peer = 0;
     do
     :: peer < RANKS && peer == self -> peer++
     :: peer < RANKS && peer != self ->
        if
        :: atomic { flag[peer * RANKS + self] == 1 -> flag[peer * RANKS + self] = 0 }; peer++
        :: flag[peer * RANKS + self] == 0 && k == 1 -> goto again /* gave up, comes again */
        fi
     :: peer == RANKS -> break
     od;
#else
     word[self] = k;
     peer = 0;
     do
     :: peer < RANKS ->
        if
        :: word[peer] >= k -> peer++
        :: word[peer] < k -> word[self] = k; peer = 0 /* gave up, comes again */
        fi
     :: else -> break
     od;
#endif
     check(k)
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
