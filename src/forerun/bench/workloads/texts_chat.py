"""Conversations, an agent's tools and Chinese texts that the tasks are made of, all written for this project. Data only."""

from __future__ import annotations

from typing import NamedTuple


class Talk(NamedTuple):
    """The turns of a conversation so far, the user's first; {n} is filled in with a number."""

    turns: tuple[str, ...]


TALKS = (
    Talk((
        "We are {n} people and want to spend a weekend in the mountains without a car. What should we think of?",
        "Three things decide such a trip. First the way there: a train with a bus that still runs on Sunday evening. Then the "
        "beds: a hut takes groups, but wants to know {n} names in advance. Last the weather: have one walk for sun and one for "
        "rain, both starting at the door.",
        "And what do we need to carry?",
        "Each of you: a rain jacket, a warm layer, water for half a day, something to eat, and a light. Shared among the {n} "
        "of you: one map on paper, one small kit with plasters, one rope for the washing line.",
    )),
    Talk((
        "My bread comes out flat. I use {n} grams of flour and leave it overnight.",
        "Flat bread after a night is usually dough that has waited too long or was too wet. With {n} grams of flour, start "
        "with two thirds of that weight in water, and a third of the yeast you use now.",
        "How do I know that it has risen enough?",
        "Press a finger into it. If the hollow springs back at once, wait; if it comes back slowly and not quite, bake; if it "
        "stays, you are late, and should shape it again gently and bake soon.",
    )),
    Talk((
        "Our web page takes {n} seconds to load. Where should we look first?",
        "Open the browser's network view and sort by time. Usually it is one of three: a large picture, a script that blocks "
        "the page, or a slow first answer of the server. {n} seconds is long enough for all three together.",
        "The first answer takes most of it.",
        "Then measure inside the server: time of the database, time of rendering, time spent waiting for another service. Log "
        "the three numbers with each request for a day before changing anything.",
    )),
    Talk((
        "I have {n} hours a week to learn the guitar. How should I use them?",
        "Split them into short sittings: a quarter of an hour of chords, a quarter of an hour of rhythm with a metronome, and "
        "the rest a song you like. With {n} hours that is a song a fortnight.",
        "My fingers hurt.",
        "That passes in a few weeks. Until then play shorter and more often, lighter strings help, and press just behind the "
        "fret, where it takes the least strength.",
    )),
    Talk((
        "The office has {n} plants and half of them are yellow.",
        "Yellow leaves mean too much water more often than too little. Lift the pots: heavy ones are wet. Of {n} plants, give "
        "only the light ones water, and only until it runs out below.",
        "Some stand far from the window.",
        "Those need the least water of all. Change places every month so that each spends a week by the window, and take out "
        "whatever is brown, since it does not turn green again.",
    )),
    Talk((
        "I must explain to {n} colleagues why we change the password rules.",
        "Begin with what happened, not with the rule: someone guessed an old password that was used in two places. Then say "
        "what changes: longer, never twice, and kept in a manager. Then show it once, slowly, to all {n}.",
        "They will ask why they cannot use the old ones.",
        "Because the old ones may already be known. Nobody can tell which, so all of them go; it is the only rule that treats "
        "everyone alike and needs no list of who is to blame.",
    )),
    Talk((
        "We want to paint a room of {n} square metres. How much paint?",
        "Count the walls, not the floor: the length around the room times its height, less doors and windows. A litre covers "
        "about seven square metres once, and you need two coats. For {n} square metres of floor that is often nine to ten "
        "litres.",
        "And in which order?",
        "Ceiling first, then walls from the window inwards, then the frames. Tape comes off while the last coat is still damp, "
        "slowly and at an angle.",
    )),
    Talk((
        "My cat wakes me up at five, {n} days in a row now.",
        "A cat that wakes you has learned that it works. For {n} days it has had an answer, even if the answer was a shoe. "
        "Feed it late in the evening, play before that, and do not get up at five, not even once.",
        "And if it does not stop?",
        "A feeder with a clock helps: then the machine is the one to be woken. After two weeks move its time by ten minutes "
        "every other day until it is a time you like.",
    )),
)  # fmt: skip

FOLLOW_UPS = (
    "Put everything you said so far into a numbered list.",
    "Now write it as a short message that I can send to the others, keeping your words where you can.",
    "Which of these would you do first, and why?",
    "Repeat your first answer, but for someone who has only one day.",
    "Make a table with two columns, what and why, from your two answers.",
    "What have we left out?",
    "Say the same again in simpler words, sentence by sentence.",
    "Sum up our conversation so far in three sentences.",
)

AGENT_SYSTEM = (
    "You handle orders with tools. In each turn answer with one JSON object and nothing else, in this form:\n"
    '{"thought": "Order ORDER is next, so its status has to be looked up.", "tool": "lookup_order", "arguments": '
    '{"order_id": "ORDER", "fields": ["status", "carrier", "expected_date"], "include_history": false}}\n'
    "Tools: lookup_order(order_id, fields, include_history), send_note(order_id, text), finish(summary)."
)
AGENT_ASK = "Look up the status of these orders one after the other: {orders}. Then finish."
AGENT_CALL = (
    '{{"thought": "Order {order} is next, so its status has to be looked up.", "tool": "lookup_order", "arguments": '
    '{{"order_id": "{order}", "fields": ["status", "carrier", "expected_date"], "include_history": false}}}}'
)
AGENT_RESULT = (
    '{{"order_id": "{order}", "status": "{status}", "carrier": "{carrier}", "expected_date": "2027-{month:02d}-{day:02d}"}}'
)
STATUSES = ("packed", "on its way", "delivered", "waiting for a part")
CARRIERS = ("Bluefin Post", "Kestrel Parcel", "Harbour Lines")

PROSE_ZH = (
    "镇上的图书馆只有两个房间。靠河的那间放着地图和旧报纸，夏天窗子总开着，船工们进来歇脚时会顺手翻几页。另一间给孩子们用，"
    "墙上贴着他们画的桥。管理员周阿姨记得每个人借过什么书，她说书像客人，走了总要有人问一声什么时候回来。",
    "修表的老秦在车站旁边开了三十年的店。他不问表值多少钱，只问表停在几点。有人拿来一块停在六点零五分的怀表，说那是父亲下班的时间。"
    "老秦修好了它，却没有把指针拨到现在，而是让那人自己来拨。",
    "秋天以后，山里的路要早走。太阳过了两点就落到松林后面，石阶上的青苔开始结霜。挑水的人把桶装得浅一些，因为摔一跤要花半天时间，"
    "少一瓢水只要多走一趟。村里的孩子从小就会算这笔账。",
    "码头上有一块黑板，写着每天的潮水和鱼价。写字的是个退休的老师，字很大，远处的船也看得见。有一次他把三写成了五，"
    "半个码头的人白等了两个小时，却没有人怪他，只是第二天有人在黑板下面放了一副新眼镜。",
    "小区的菜园分成了二十四块，每块两米宽。第一年大家各种各的，第二年开始换着种，因为有人只会种豆子，有人只会种瓜。"
    "到了第三年，谁家的地在哪里已经说不清了，收成却比头一年多了一倍。",
    "火车晚点了四十分钟，候车室里的人慢慢开始说话。卖灯泡的推销员教一个学生怎样看灯丝，一位老太太把橘子分给了五个不认识的人。"
    "车终于来的时候，竟有人觉得来得早了一些。",
    "厂里新来的机器会自己量尺寸，老师傅们起初不信，拿卡尺跟在后面又量了一遍。量了三个月，差得最多的一次是头发丝的一半。"
    "从那以后，卡尺收进了抽屉，但每个月的第一天还是要拿出来，擦干净，再量一次。",
    "台风过后，邮差发现有三条街的门牌都被吹掉了。他凭着记忆把信送完，一封也没有错。有人问他怎么记得住，他说他记的不是号码，"
    "是每家门口的声音：有的是狗，有的是收音机，有的是一扇关不严的门。",
)

TOPICS_ZH = (
    "天空为什么是蓝色的", "自行车为什么不会倒", "面包为什么会发起来", "潮汐是怎么来的", "冰箱怎样制冷", "树叶为什么变黄",
    "疫苗怎样起作用", "彩虹是怎样形成的", "人为什么要睡觉", "麦克风怎样把声音变成电", "土壤为什么有肥有瘦", "星星是怎样诞生的",
    "金属为什么导电", "闰年有什么用", "蜜蜂怎样酿蜜", "冰为什么浮在水上", "玻璃是怎样做成的", "锁是怎样工作的",
    "火山为什么喷发", "云为什么会下雨", "四季为什么更替", "纸是怎样造出来的", "切洋葱为什么流泪", "指南针为什么指北",
)  # fmt: skip

READERS_ZH = (
    "十岁的孩子", "从没学过这门课的大人", "赶时间的上班族", "准备考试的中学生", "好奇的老人", "写科普文章的记者",
    "第一次带班的老师", "对此半信半疑的朋友",
)  # fmt: skip

TALKS_ZH = (
    Talk((
        "我们{n}个人想周末去山里，不开车，要注意什么？",
        "先定三件事。一是交通，要有星期天傍晚还开的班车；二是住处，山里的客栈要提前报{n}个人的名字；三是天气，准备一条晴天的路和一条雨天的路。",
        "要带些什么？",
        "每人一件雨衣、一件厚衣服、半天的水、一点吃的和一支手电。{n}个人合用的有一张纸地图、一小包药和一根晾衣绳。",
    )),
    Talk((
        "我用{n}克面粉做面包，总是发不起来。",
        "常见的原因是水太多，或者放得太久。{n}克面粉先用三分之二重量的水，酵母减到现在的三分之一，再看第二天早上的样子。",
        "怎么知道发好了？",
        "用手指按一下。马上弹回来，再等等；慢慢弹回来一半，可以烤；不弹回来，就是过了，要轻轻再整形一次。",
    )),
    Talk((
        "我们的网页要{n}秒才能打开，先查哪里？",
        "打开浏览器的网络面板，按时间排序。多半是三样之一：图片太大，脚本挡住了页面，或者服务器第一次回答太慢。{n}秒够这三样凑在一起。",
        "大部分时间在第一次回答。",
        "那就在服务器里量三个数：数据库的时间、渲染的时间、等别的服务的时间。每个请求都记下来，记满一天再动手改。",
    )),
    Talk((
        "办公室有{n}盆花，一半都黄了。",
        "叶子发黄多半是水浇多了。把盆拎一拎，重的就是湿的。{n}盆里只给轻的浇，浇到底下流出水为止。",
        "有几盆离窗户很远。",
        "那几盆最不需要水。每个月换一次位置，让每盆都在窗边待一个星期，枯掉的叶子剪掉，它们不会再变绿。",
    )),
)  # fmt: skip

FOLLOW_UPS_ZH = (
    "把你说过的内容整理成一个编号列表。",
    "把它写成一条可以发给大家的短消息，尽量用你原来的话。",
    "如果只能先做一件，你选哪件？为什么？",
    "把你的第一个回答再说一遍，但只有一天时间。",
    "根据你的两个回答做一个两列的表格：做什么，为什么。",
    "我们还漏了什么？",
    "用更简单的话一句一句再说一遍。",
    "用三句话总结我们刚才的谈话。",
)
