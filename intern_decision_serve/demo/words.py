"""Common English and domain words: what the demo tokenizer learns its merges from.

Data only, kept in the package so that the tokenizer comes out the same everywhere.
"""

from __future__ import annotations

__all__ = ["WORDS"]

WORDS: tuple[str, ...] = tuple(
    """
the of and to in is that it for was on are as with they be at one have this from or
had by not but what some we can out other were all there when up use your how said an
each she which do their time if will way about many then them write would like so
these her long make thing see him two has look more day could go come did number sound
no most people my over know water than call first who may down side been now find any
new work part take get place made live where after back little only round man year
came show every good me give our under name very through just form sentence great
think say help low line differ turn cause much mean before move right boy old too same
tell does set three want air well also play small end put home read hand port large
spell add even land here must big high such follow act why ask men change went light
kind off need house picture try us again animal point mother world near build self
earth father head stand own page should country found answer school grow study still
learn plant cover food sun four between state keep eye never last let thought city
tree cross farm hard start might story saw far sea draw left late run while press
close night real life few north open seem together next white children begin got walk
example ease paper group always music those both mark often letter until mile river
car feet care second book carry took science eat room friend began idea fish mountain
stop once base hear horse cut sure watch color face wood main enough plain girl usual
young ready above ever red list though feel talk bird soon body dog family direct pose
leave song measure door product black short numeral class wind question happen
complete ship area half rock order fire south problem piece told knew pass since top
whole king space heard best hour better true during hundred five remember step early
hold west ground interest reach fast verb sing listen six table travel less morning
ten simple several vowel toward war lay against pattern slow center love person money
serve appear road map rain rule govern pull cold notice voice unit power town fine
certain fly fall lead cry dark machine note wait plan figure star box noun field rest
correct able pound done beauty drive stood contain front teach week final gave green
quick develop ocean warm free minute strong special mind behind clear tail produce
fact street inch multiply nothing course stay wheel full force blue object decide
surface deep moon island foot system busy test record boat common gold possible plane
stead dry wonder laugh thousand ago ran check game shape equate hot miss brought heat
snow tire bring yes distant fill east paint language among grand ball yet wave drop
heart present heavy dance engine position arm wide sail material size vary settle
speak weight general ice matter circle pair include divide syllable felt perhaps pick
sudden count square reason length represent art subject region energy hunt probable
bed brother egg ride cell believe fraction forest sit race window store summer train
sleep prove lone leg exercise wall catch mount wish sky board joy winter sat written
wild instrument kept glass grass cow job edge sign visit past soft fun bright gas
weather month million bear finish happy hope flower clothe strange gone jump baby
eight village meet root buy raise solve metal whether push seven paragraph third shall
held hair describe cook floor either result burn hill safe cat century consider type
law bit coast copy phrase silent tall sand soil roll temperature finger industry value
fight lie beat excite natural view sense ear else quite broke case middle kill son
lake moment scale loud spring observe child straight consonant nation dictionary milk
speed method organ pay age section dress cloud surprise quiet stone tiny climb cool
design poor lot experiment bottom key iron single stick flat twenty skin smile crease
hole trade melody trip office receive row mouth exact symbol die least trouble shout
except wrote seed tone join suggest clean break lady yard rise bad blow oil blood
touch grew cent mix team wire cost lost brown wear garden equal sent choose fell fit
flow fair bank collect save control decimal gentle woman captain practice separate
difficult doctor please protect noon whose locate ring character insect caught period
indicate radio spoke atom human history effect electric expect crop modern element hit
student corner party supply bone rail imagine provide agree thus capital chair danger
fruit rich thick soldier process operate guess necessary sharp wing create neighbor
wash bat rather crowd corn compare poem string bell depend meat rub tube famous dollar
stream fear sight thin triangle planet hurry chief colony clock mine tie enter major
fresh search send yellow gun allow print dead spot desert suit current lift rose
continue block chart hat sell success company subtract event particular deal swim term
opposite wife shoe shoulder spread arrange camp invent cotton born determine quart
nine truck noise level chance gather shop stretch throw shine property column molecule
select wrong gray repeat require broad prepare salt nose plural anger claim continent

request response message customer account payment invoice refund order delivery urgent
escalate approve reject review policy support ticket priority confidence probability
option options field fields schema decision decisions state symbol symbols answer
agent user users email phone address date amount total currency error warning status
failed failure success server client service network database update deploy release
version contract license software source code file files data document documents model
token tokens prompt context input output reports reported requests responses messages
customers payments reasons describes described following provided including required
information available because without however therefore another different important
between everything something someone within already another against whether criteria
instructions description describe category classify severity action tool function
argument parameter result results type types name names identifier text string number
boolean true false null list object array score rate rating low medium high critical
billing shipping account technical sales security privacy legal human review manual
automatic agreement conditions permission notice copies distribute modify terms
copyright damage liability warranty express implied purpose particular party
Python license agree Foundation software Corporation redistribution material
ing tion ment ness able less ful ity ous ive ation ence ance ally ical ist ism ize
pre con dis inter over under trans super anti non per pro sub com ex re un in de
arrive today tomorrow yesterday tonight otherwise charge promise dispute colleague
someone anyone everyone nobody anything somewhere anywhere perhaps almost maybe really
actually already sometimes usually recently finally currently immediately directly
please thanks sorry hello regards dear ask buy sell pay spend save owe own return
replace repair cancel renew confirm refuse accept reply forward attach upload download
install restart reset login password browser website page link button screen laptop
computer mobile app feature bug crash slow offline online broken damaged torn missing
late early faulty defective incorrect duplicate expired pending active closed invoice
receipt tax fee discount coupon credit debit card transfer deposit bank loan insurance
mortgage salary budget price total balance subscription monthly yearly weekly daily
parcel package courier warehouse stock item quantity jacket shirt sleeve bottle phone
kitchen bathroom hotel flight ticket seat passenger airport luggage booking reservation
patient nurse hospital medicine symptom pain dose treatment diagnosis appointment
lawyer court claim evidence witness police accident injury theft fraud suspicious
employee manager director hiring interview candidate resume skill training meeting
schedule deadline project task progress budget proposal draft summary paragraph email
article news editor author publish headline opinion topic discuss argue claim quote
weather storm flood traffic parking vehicle driver license tire brake battery fuel
toxic harmful polite rude angry calm upset happy satisfied disappointed frustrated
relevant accurate helpful useful harmless dangerous illegal private public internal
external central local global current previous original final initial maximum minimum
average total partial complete empty invalid valid unknown known likely unlikely
possible impossible certain uncertain exact rough simple complex general specific
everything whatever whenever wherever whoever themselves himself herself itself myself
January February March April May June July August September October November December
Monday Tuesday Wednesday Thursday Friday Saturday Sunday
""".split()
)
